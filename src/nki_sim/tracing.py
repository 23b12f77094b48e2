def active():
    return None
def trace(): pass
