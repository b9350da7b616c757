"""Tables, figures and analyses that only the three papers need. Nothing but the command line imports them."""
