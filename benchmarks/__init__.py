"""Scripts behind the numbers in the documentation."""
