-- What a cluster's agent says of itself and of what no snapshot shows, with the difference of its clock from ours.
CREATE TABLE cluster_facts (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    epoch INTEGER NOT NULL,
    facts TEXT NOT NULL,
    skew_ms INTEGER NOT NULL,
    said_at INTEGER NOT NULL
);

-- The agent's chart that a cluster's repository carries, and its values.
CREATE TABLE agent_releases (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    version TEXT NOT NULL,
    "values" TEXT NOT NULL,
    released_at INTEGER NOT NULL
);
