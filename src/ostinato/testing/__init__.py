"""What tests of code on several ranks need, and users may."""
