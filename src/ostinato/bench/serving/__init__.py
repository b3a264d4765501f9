"""``ostinato bench serve``: what a server does with requests that come when they come."""
