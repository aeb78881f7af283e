"""The method's mathematics on plain arrays: no torch, no files, no clock, no logging."""
