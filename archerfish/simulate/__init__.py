"""A service of many replicas in virtual time: the real router, schedulers and caches, over engines that only take
time."""
