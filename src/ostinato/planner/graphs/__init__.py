"""Plans capture sizes from requests, or from the steps of a running engine, and measured costs."""
