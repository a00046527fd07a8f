"""Which replica gets a request: one policy for front ends, Ray and the simulator."""
