"""The hand-off: requests of a front end, handed to any number of back ends, in order and in groups."""
