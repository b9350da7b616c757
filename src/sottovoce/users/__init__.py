"""Who is a client: populations of a store's speakers, and how speech is spread over them."""

from sottovoce.users.population import Client, LeftOut, Population, build_population, check_disjoint
from sottovoce.users.rules import PopulationSettings, SeedPart

__all__ = [
    "Client",
    "LeftOut",
    "Population",
    "PopulationSettings",
    "SeedPart",
    "build_population",
    "check_disjoint",
]
