"""Python imports this at its start, in commands that a test has given a point at which they are held."""

from tests.points import arm

arm()
