"""`loragate bench`: load on any OpenAI-compatible server over HTTP, and what came of it.

It shares the machine with the server that it measures, so its own cost per streamed chunk matters:
`connection.py` is a protocol on httptools rather than an HTTP client with a task for each answer.
"""
