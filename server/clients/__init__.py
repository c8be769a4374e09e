"""What the HTTP application may hold as its engine beside one in this process, and what that asks of other workers."""
