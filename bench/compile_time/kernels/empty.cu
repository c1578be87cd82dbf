// budget: 3 s
