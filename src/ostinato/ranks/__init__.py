"""The processes of a multi-rank model: started, connected, watched, and told what to run."""
