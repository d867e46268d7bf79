"""What a drafter does with what the target gives it (arXiv 2604.26412 argues it; here it is measured)."""
