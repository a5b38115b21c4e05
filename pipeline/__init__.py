"""The pipeline's light side: configuration, layout arithmetic, registry, launch and reports. Nothing here starts torch at import."""
