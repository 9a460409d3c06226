"""A package that somebody else could have written for LMCache: objects in a directory.

It knows nothing of SplitZip. `third_party_store.backend` is a storage backend for LMCache's
`storage_plugins`, `third_party_store.connector` holds connectors for `remote_storage_plugins`.
"""
