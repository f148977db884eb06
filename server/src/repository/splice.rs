//! Puts changed files into a tree: bare repository, no checkout, no index. Costs what changes,
//! not what is there.

use git2::{FileMode, ObjectType, Oid, Repository, Time, Tree, build::TreeUpdateBuilder};
use std::collections::BTreeMap;

/// What happens to one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// The file shall have this content.
    Write(String),
    /// The file shall have this content unless there is one already.
    Keep(String),
    /// The file shall not be there.
    Remove,
}

/// What happens, by path in the repository.
pub type Edits = BTreeMap<String, Edit>;

/// Author or committer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Name.
    pub name: String,
    /// Email.
    pub email: String,
}

/// From how many new files on objects go into one pack instead of a file each.
const PACK_FROM: usize = 500;

/// The tree of `base` (`None`: empty) with `edits`. An edit that changes nothing costs a look-up.
///
/// # Errors
/// When an object cannot be read or written, or a path leads through a file.
pub fn splice(repository: &Repository, base: Option<&Tree<'_>>, edits: &Edits) -> Result<Oid, git2::Error> {
    if edits.len() >= PACK_FROM {
        return write_objects_packed(repository, || splice_objects(repository, base, edits));
    }
    splice_objects(repository, base, edits)
}

fn splice_objects(repository: &Repository, base: Option<&Tree<'_>>, edits: &Edits) -> Result<Oid, git2::Error> {
    let empty;
    let base = match base {
        Some(tree) => tree,
        None => {
            empty = repository.find_tree(repository.treebuilder(None)?.write()?)?;
            &empty
        }
    };
    let mut builder = TreeUpdateBuilder::new();
    let mut changed = false;
    for (path, edit) in edits {
        let existing = entry(base, path)?;
        match edit {
            Edit::Keep(_) if existing.is_some() => {}
            Edit::Write(content) | Edit::Keep(content) => {
                let id = Oid::hash_object(ObjectType::Blob, content.as_bytes())?;
                if existing != Some(id) {
                    repository.blob(content.as_bytes())?;
                    builder.upsert(path.as_str(), id, FileMode::Blob);
                    changed = true;
                }
            }
            Edit::Remove => {
                if existing.is_some() {
                    builder.remove(path.as_str());
                    changed = true;
                }
            }
        }
    }
    if changed { builder.create_updated(repository, base) } else { Ok(base.id()) }
}

/// Id of what lies at `path`.
fn entry(tree: &Tree<'_>, path: &str) -> Result<Option<Oid>, git2::Error> {
    match tree.get_path(std::path::Path::new(path)) {
        Ok(entry) => Ok(Some(entry.id())),
        Err(error) if error.code() == git2::ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs `work` with its new objects kept in memory, then writes them as one pack: ten thousand
/// loose files would cost more than everything else together.
///
/// # Errors
/// Those of `work`, or when the pack cannot be written.
pub fn write_objects_packed(
    repository: &Repository,
    work: impl FnOnce() -> Result<Oid, git2::Error>,
) -> Result<Oid, git2::Error> {
    use std::io::Write as _;
    let database = repository.odb()?;
    let memory = database.add_new_mempack_backend(1000)?;
    let result = work()?;
    let mut pack = git2::Buf::new();
    memory.dump(repository, &mut pack)?;
    memory.reset()?;
    if !pack.is_empty() {
        let mut writer = database.packwriter()?;
        writer.write_all(&pack).map_err(|error| git2::Error::from_str(&format!("pack: {error}")))?;
        writer.commit()?;
    }
    Ok(result)
}

/// A commit object on `parent`; no reference is moved. `seconds` since the Unix epoch.
///
/// # Errors
/// When it cannot be written.
pub fn commit(
    repository: &Repository,
    tree: Oid,
    parent: Option<Oid>,
    message: &str,
    author: &Signature,
    committer: &Signature,
    seconds: i64,
) -> Result<Oid, git2::Error> {
    let time = Time::new(seconds, 0);
    let author = git2::Signature::new(&author.name, &author.email, &time)?;
    let committer = git2::Signature::new(&committer.name, &committer.email, &time)?;
    let parent = parent.map(|id| repository.find_commit(id)).transpose()?;
    let parents: Vec<&git2::Commit<'_>> = parent.iter().collect();
    repository.commit(None, &author, &committer, message, &repository.find_tree(tree)?, &parents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(repository: &Repository, tree: Oid) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        let tree = repository.find_tree(tree).unwrap();
        tree.walk(git2::TreeWalkMode::PreOrder, |folder, entry| {
            if entry.kind() == Some(ObjectType::Blob) {
                let blob = repository.find_blob(entry.id()).unwrap();
                files.insert(
                    format!("{folder}{}", entry.name().unwrap_or_default()),
                    String::from_utf8_lossy(blob.content()).into_owned(),
                );
            }
            git2::TreeWalkResult::Ok
        })
        .unwrap();
        files
    }

    fn path() -> impl Strategy<Value = String> {
        // Folders a and b, files f…: no path leads through a file.
        prop::collection::vec("[ab]", 0..3)
            .prop_flat_map(|folders| "f[0-4]".prop_map(move |file| [folders.clone(), vec![file]].concat().join("/")))
    }

    fn edit() -> impl Strategy<Value = Edit> {
        prop_oneof!["[x-z]{1,2}".prop_map(Edit::Write), "[x-z]{1,2}".prop_map(Edit::Keep), Just(Edit::Remove)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn splicing_does_to_a_tree_what_the_edits_say(rounds in prop::collection::vec(prop::collection::btree_map(path(), edit(), 0..8), 1..5), packed: bool) {
            let folder = tempfile::tempdir().unwrap();
            let repository = Repository::init_bare(folder.path()).unwrap();
            let mut expected: BTreeMap<String, String> = BTreeMap::new();
            let mut tree: Option<Oid> = None;
            for edits in rounds {
                for (path, edit) in &edits {
                    match edit {
                        Edit::Write(text) => { expected.insert(path.clone(), text.clone()); }
                        Edit::Keep(text) => { expected.entry(path.clone()).or_insert_with(|| text.clone()); }
                        Edit::Remove => { expected.remove(path); }
                    }
                }
                let base = tree.map(|id| repository.find_tree(id).unwrap());
                let next = if packed {
                    write_objects_packed(&repository, || splice_objects(&repository, base.as_ref(), &edits)).unwrap()
                } else {
                    splice(&repository, base.as_ref(), &edits).unwrap()
                };
                let fresh = Repository::open_bare(folder.path()).unwrap();
                prop_assert_eq!(read(&fresh, next), expected.clone());
                tree = Some(next);
            }
        }
    }
}
