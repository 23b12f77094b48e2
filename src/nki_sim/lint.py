def lint(fn, version="0.6"):
    return []
