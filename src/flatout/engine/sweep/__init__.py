"""Many trainings that differ in some settings, and the best of them."""
