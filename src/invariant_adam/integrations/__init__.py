"""Trainers of other libraries, one file each: imported by name, since each needs its library."""
