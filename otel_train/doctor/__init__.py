"""What is wrong with an installation, its settings or the way its figures take, each with a remedy."""
