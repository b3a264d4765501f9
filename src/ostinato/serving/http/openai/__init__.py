"""OpenAI's API: its routes, the bodies of requests and answers, streams of events."""
