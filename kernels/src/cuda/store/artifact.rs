//! The file of one artifact: lines that say what it is, an empty line, and the machine code.
//!
//! ```text
//! statecopy artifact 1
//! arch sm_90
//! class fused-item4-vector16-even
//! source <64 hexadecimal digits>
//! compiler nvrtc-13.0
//! bytes 43096
//! blake3 <64 hexadecimal digits, of the code>
//!
//! <the code>
//! ```

use std::str::{self, FromStr};

use crate::cuda::class::CudaClass;
use crate::cuda::compile::Arch;

const MAGIC: &str = "statecopy artifact 1";
/// Bytes of a file at most. The largest that is compiled has about 100 KiB.
pub(super) const FILE_BYTES_MAX: u64 = 16 << 20;
/// Bytes of the lines at most.
const HEADER_BYTES_MAX: usize = 1_024;

/// Which artifact: everything that its code depends on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ArtifactKey {
    /// The chip.
    pub arch: Arch,
    /// The class.
    pub class: CudaClass,
    /// [`source_hash`](crate::cuda::compile::source_hash) of what was compiled.
    pub source: String,
    /// The compiler, as in `nvrtc-13.0`.
    pub compiler: String,
}

/// Why a file is no artifact, or not the one that its name says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// It does not begin as an artifact does.
    #[error("it does not begin as an artifact does")]
    Header,
    /// It has fewer or more bytes than it says.
    #[error("it has {found} bytes of code where it says {said}")]
    Size {
        /// What it has.
        found: u64,
        /// What it says.
        said: u64,
    },
    /// It is far too large.
    #[error("it has {found} bytes, more than {FILE_BYTES_MAX}")]
    TooLarge {
        /// What it has.
        found: u64,
    },
    /// Bits of it changed.
    #[error("its code is not what was written: the BLAKE3 hash differs")]
    Digest,
    /// It is another artifact than its name says.
    #[error("it is the artifact of another {what}: {found}")]
    Other {
        /// `arch`, `class`, `source` or `compiler`.
        what: &'static str,
        /// The value in it.
        found: String,
    },
}

/// The bytes of the file.
pub(super) fn encode(key: &ArtifactKey, code: &[u8]) -> Vec<u8> {
    let mut file = format!(
        "{MAGIC}\narch {}\nclass {}\nsource {}\ncompiler {}\nbytes {}\nblake3 {}\n\n",
        key.arch,
        key.class.name(),
        key.source,
        key.compiler,
        code.len(),
        blake3::hash(code).to_hex()
    )
    .into_bytes();
    file.extend_from_slice(code);
    file
}

/// What a file holds, checked in itself.
pub(super) fn decode(file: &[u8]) -> Result<(ArtifactKey, &[u8]), Broken> {
    let end = file
        .windows(2)
        .take(HEADER_BYTES_MAX)
        .position(|pair| pair == b"\n\n")
        .ok_or(Broken::Header)?;
    let header = str::from_utf8(&file[..end]).map_err(|_| Broken::Header)?;
    let code = &file[end + 2..];
    let mut lines = header.split('\n');
    if lines.next() != Some(MAGIC) {
        return Err(Broken::Header);
    }
    let arch = Arch::from_str(value(&mut lines, "arch ")?).map_err(|_| Broken::Header)?;
    let class = CudaClass::named(value(&mut lines, "class ")?).ok_or(Broken::Header)?;
    let source = value(&mut lines, "source ")?.to_owned();
    let compiler = value(&mut lines, "compiler ")?.to_owned();
    let said = value(&mut lines, "bytes ")?.parse().map_err(|_| Broken::Header)?;
    let digest = value(&mut lines, "blake3 ")?;
    if lines.next().is_some() {
        return Err(Broken::Header);
    }
    let found = code.len() as u64;
    if found != said {
        return Err(Broken::Size { found, said });
    }
    if blake3::hash(code).to_hex().as_str() != digest {
        return Err(Broken::Digest);
    }
    Ok((ArtifactKey { arch, class, source, compiler }, code))
}

fn value<'a>(lines: &mut str::Split<'a, char>, name: &str) -> Result<&'a str, Broken> {
    lines.next().and_then(|line| line.strip_prefix(name)).ok_or(Broken::Header)
}

/// Whether a file that says `found` may stand where `wanted` is looked for.
pub(super) fn compare(found: &ArtifactKey, wanted: &ArtifactKey) -> Result<(), Broken> {
    let pairs = [
        ("arch", found.arch.to_string(), wanted.arch.to_string()),
        ("class", found.class.name(), wanted.class.name()),
        ("source", found.source.clone(), wanted.source.clone()),
        ("compiler", found.compiler.clone(), wanted.compiler.clone()),
    ];
    match pairs.into_iter().find(|(_, found, wanted)| found != wanted) {
        Some((what, found, _)) => Err(Broken::Other { what, found }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> ArtifactKey {
        ArtifactKey {
            arch: Arch::of_capability(9, 0),
            class: CudaClass::all()[0],
            source: "ab".repeat(32),
            compiler: "nvrtc-13.0".to_owned(),
        }
    }

    #[test]
    fn a_file_says_what_it_is() {
        let file = encode(&key(), b"code\n\nwith lines");
        let (found, code) = decode(&file).unwrap();
        assert_eq!((found, code), (key(), &b"code\n\nwith lines"[..]));
        assert!(file.starts_with(b"statecopy artifact 1\narch sm_90\nclass "));
    }

    #[test]
    fn every_truncation_and_every_flipped_bit_is_noticed() {
        let file = encode(&key(), b"\x7fELF and more");
        for end in 0..file.len() {
            assert!(decode(&file[..end]).is_err(), "{end}");
        }
        for at in 0..file.len() {
            for bit in 0..8 {
                let mut file = file.clone();
                file[at] ^= 1 << bit;
                // What still reads as an artifact says that it is another one.
                if let Ok((found, _)) = decode(&file) {
                    assert!(compare(&found, &key()).is_err(), "byte {at}, bit {bit}");
                }
            }
        }
        let mut longer = file;
        longer.push(0);
        assert_eq!(decode(&longer), Err(Broken::Size { found: 14, said: 13 }));
        assert_eq!(decode(&vec![b'a'; 10_000]), Err(Broken::Header));
    }
}
