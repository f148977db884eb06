-- What a cluster's agent says of itself and of what no snapshot shows, with the difference of its clock from ours.
CREATE TABLE cluster_facts (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    epoch BIGINT NOT NULL,
    facts JSON NOT NULL,
    skew_ms BIGINT NOT NULL,
    said_at BIGINT NOT NULL
);

-- The agent's chart that a cluster's repository carries, and its values.
CREATE TABLE agent_releases (
    cluster_id TEXT PRIMARY KEY NOT NULL REFERENCES clusters (id),
    version TEXT NOT NULL,
    "values" JSON NOT NULL,
    released_at BIGINT NOT NULL
);
