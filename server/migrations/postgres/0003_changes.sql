-- What a deployment itself said when an instance was made: a rollback gives it back. JSON.
ALTER TABLE instances ADD COLUMN sources JSON;
