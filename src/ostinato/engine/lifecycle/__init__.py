"""What an engine does between requests: sleep and wake, new weights, adapters, graphs."""
