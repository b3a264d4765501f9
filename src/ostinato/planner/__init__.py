"""What a layout would cost, before it is run."""
