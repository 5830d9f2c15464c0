"""What is measured, and the machinery that measures it."""
