"""One way to write a file or folder all or nothing, and one way to read a record."""
