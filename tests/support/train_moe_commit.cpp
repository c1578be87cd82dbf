// The commit that tests of the trainer log, in place of the one that is built.
extern const char train_moe_commit[];
const char train_moe_commit[] = "abc";
