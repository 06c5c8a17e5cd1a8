"""The ledger: a balance that racing purchases cannot overdraw, and a payment that is sent once."""
