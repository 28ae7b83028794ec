"""The training thread's side: read a clock, append two words, go on."""
