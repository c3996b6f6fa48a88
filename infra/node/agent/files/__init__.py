"""The files of a project on this node: paths, walks, who may change them, and where they came from (sync,
pull, share).

It only reads them; sync/ and share/ write."""
