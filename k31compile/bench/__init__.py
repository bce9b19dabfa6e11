"""What `k31 bench` measures and how: cases as data, one clock, alternation, and a number only where there is one."""
