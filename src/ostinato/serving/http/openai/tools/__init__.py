"""Tool calls in chats: what a request asks for, how a model writes calls, and reading them."""
