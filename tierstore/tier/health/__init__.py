"""Is the device of a tier worth asking?"""
