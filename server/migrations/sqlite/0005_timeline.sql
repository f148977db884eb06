-- What reports showed of a deployment beside its tasks.
CREATE TABLE observations (
    id TEXT PRIMARY KEY NOT NULL,
    deployment_id TEXT NOT NULL REFERENCES deployments (id),
    at INTEGER NOT NULL,
    kind TEXT NOT NULL,
    title TEXT NOT NULL,
    message TEXT
);
CREATE INDEX observations_deployment ON observations (deployment_id, at);
CREATE INDEX observations_at ON observations (at);

-- What is older than people want to keep.
CREATE INDEX tasks_ended ON tasks (ended_at) WHERE ended_at IS NOT NULL;
