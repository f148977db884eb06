//! Objects in memory, compressed: ten thousand of them have to fit where one agent lives.
//!
//! Objects of one kind are much alike, so the first one serves as the dictionary of the others. Pure; holds
//! nothing but what it was given.

use crate::snapshot::mark;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use zstd::bulk::{Compressor, Decompressor};

/// Level of compression: the lowest is about as small for what is so alike.
const LEVEL: i32 = 1;
/// Most bytes of a dictionary.
const DICTIONARY_MAX: usize = 32 << 10;

/// Compresses objects of one kind.
#[derive(Clone, Default)]
pub struct Packer {
    tools: Arc<Mutex<Option<Tools>>>,
}

struct Tools {
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Packer")
    }
}

impl Tools {
    fn new(first: &[u8]) -> std::io::Result<Self> {
        let dictionary = &first[..first.len().min(DICTIONARY_MAX)];
        Ok(Self {
            compressor: Compressor::with_dictionary(LEVEL, dictionary)?,
            decompressor: Decompressor::with_dictionary(dictionary)?,
        })
    }
}

impl Packer {
    /// An object, compressed.
    #[must_use]
    pub fn pack<T: Serialize>(&self, object: &T) -> Packed {
        let plain = serde_json::to_vec(object).unwrap_or_default();
        let mut tools = self.tools.lock().unwrap_or_else(PoisonError::into_inner);
        if tools.is_none() {
            *tools = Tools::new(&plain).ok();
        }
        let small = tools.as_mut().and_then(|tools| tools.compressor.compress(&plain).ok());
        let size = u32::try_from(plain.len()).unwrap_or(u32::MAX);
        // What cannot be compressed is kept as it is; a size of 0 says so.
        let (bytes, size) = small.map_or((plain, 0), |small| (small, size));
        Packed { bytes: bytes.into(), size, packer: self.clone() }
    }
}

/// An object, compressed. Two are equal when their objects are.
#[derive(Debug, Clone)]
pub struct Packed {
    bytes: Arc<[u8]>,
    size: u32,
    packer: Packer,
}

impl PartialEq for Packed {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl Packed {
    /// Differs whenever the object does.
    #[must_use]
    pub fn mark(&self) -> u64 {
        mark((&self.bytes, self.size))
    }

    /// The object; `None` when it is none of this type.
    #[must_use]
    pub fn unpack<T: DeserializeOwned>(&self) -> Option<T> {
        if self.size == 0 {
            return serde_json::from_slice(&self.bytes).ok();
        }
        let mut tools = self.packer.tools.lock().unwrap_or_else(PoisonError::into_inner);
        let plain = tools.as_mut()?.decompressor.decompress(&self.bytes, self.size as usize).ok()?;
        drop(tools);
        serde_json::from_slice(&plain).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn objects_come_back_and_are_small() {
        let packer = Packer::default();
        let object = |number: u32| {
            json!({ "metadata": { "name": format!("styrmin-{number}"), "labels": { "app.kubernetes.io/managed-by": "styrmin" } },
                "spec": { "context": (0..50).map(|key| (format!("key-{key}"), json!("value"))).collect::<serde_json::Map<_, _>>() } })
        };
        let packed: Vec<Packed> = (0..10).map(|number| packer.pack(&object(number))).collect();
        for (number, packed) in (0..).zip(&packed) {
            assert_eq!(packed.unpack::<Value>(), Some(object(number)));
            assert_eq!(*packed, packer.pack(&object(number)));
            assert!(packed.bytes.len() < 100, "{} bytes", packed.bytes.len());
        }
        assert_ne!(packed[0], packed[1]);
        assert_eq!(packed[0].unpack::<Vec<u8>>(), None, "it is no list");
    }
}
