// budget: 0.02 s
// The floor: what a compiler needs for nothing.
int nothing(int rank) {
  return rank;
}
