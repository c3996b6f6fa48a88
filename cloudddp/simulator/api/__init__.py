"""The simulator's server: moto's API with access control, conditions and the admin API in front of it."""
