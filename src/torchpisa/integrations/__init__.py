"""Bridges to other libraries, one module each; a module is imported only by those who have it."""
