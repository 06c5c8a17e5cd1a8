"""The checkout: an endpoint that charges once, however often and wherever its button is pressed."""
