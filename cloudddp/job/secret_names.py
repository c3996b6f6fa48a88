"""Names of files that hold secrets by convention: private keys, credentials, tokens, shell histories.

They are withheld from the nodes at any depth, unless git tracks them or sync.include has their exact path:
nodes are machines in a cloud, and a .gitignore does not always name them.
"""

from __future__ import annotations

from pathlib import Path

# In the syntax of .gitignore, for names in lower case. docs/security.md explains them to users.
PATTERNS = tuple(
    word
    for line in """
    # variables
    .env .env.* *.env .envrc
    # private keys and key stores
    id_rsa id_dsa id_ecdsa id_ed25519 id_rsa_* id_dsa_* id_ecdsa_* id_ed25519_* .ssh/ .gnupg/ *.pem
    *.key *.ppk *.p12 *.pfx *.jks *.keystore *.kdbx
    # clouds and clusters
    .aws/ .azure/ .oci/ .kube/ **/.config/gcloud/ .boto .s3cfg .databrickscfg .vault-token
    application_default_credentials.json service-account*.json service_account*.json client_secret*.json
    *.tfstate *.tfstate.* rclone.conf
    # registries, git hosts and other services
    **/.docker/config.json .dockercfg .netrc _netrc .git-credentials **/.config/gh/ .pypirc .npmrc
    **/.cargo/credentials **/.cargo/credentials.toml .pgpass .my.cnf .htpasswd
    **/.streamlit/secrets.toml .modal.toml
    # model and data hubs
    **/huggingface/token **/huggingface/stored_tokens **/.huggingface/token kaggle.json
    # histories of shells and interpreters
    .*_history .rhistory fish_history
    """.splitlines()
    for word in line.partition("# ")[0].split()
)

_HEAD = 1 << 20  # bytes in which a private key is looked for


def is_certificate(path: Path) -> bool:
    """Return whether a .pem file has no private key: certificates are public."""
    if path.suffix.lower() != ".pem":
        return False
    try:
        with path.open("rb") as file:
            return b"PRIVATE KEY" not in file.read(_HEAD)
    except OSError:
        return False
