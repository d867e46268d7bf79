"""Many trainings compared fairly: what is trained, on what of a cluster, and what came out."""
