"""The HTTP API: OpenAI's, Anthropic's and Ollama's dialects over one stream, and muster's own."""
