"""The service on a cluster: Ray places, scales, heals and updates engine hosts, and front ends find them."""
