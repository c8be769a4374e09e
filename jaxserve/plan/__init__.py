"""What a deployment takes before anyone rents it: the real step compiled for chips that are not here, and counted."""
