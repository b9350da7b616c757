"""The long loops: central training now, federation and pre-training later."""
