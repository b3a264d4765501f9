"""The processes of several ranks: started, connected, watched, and told what to run."""
