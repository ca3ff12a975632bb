//! What depends on the descriptor limit, which belongs to the whole process: it has a process of its own here.

use std::io::Read;
use std::os::fd::AsFd;

use rustix::pipe::pipe;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use statecopy_descriptors::{ChannelError, Connection, DescriptorLimit, raise_descriptor_limit};

#[test]
fn the_descriptor_limit_is_raised_and_where_it_is_reached_descriptors_are_lost_by_an_error() {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(512), ..before }).unwrap();
    let limit = raise_descriptor_limit().unwrap();
    assert_eq!(limit, DescriptorLimit { soft: before.maximum, hard: before.maximum });
    assert_eq!(getrlimit(Resource::Nofile).current, before.maximum);

    let (one, other) = Connection::pair().unwrap();
    let (reader, writer) = pipe().unwrap();
    one.send(b"x", &[writer.as_fd(), writer.as_fd()]).unwrap();
    drop(writer);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..before }).unwrap();
    let cut = other.receive(&mut [0; 8], 2);
    setrlimit(Resource::Nofile, before).unwrap();
    assert!(matches!(cut, Err(ChannelError::DescriptorsTruncated)), "{cut:?}");
    // Every writing end is closed, so the pipe has ended.
    assert_eq!(std::fs::File::from(reader).read(&mut [0]).unwrap(), 0);
    one.send(b"next", &[]).unwrap();
    assert_eq!(other.receive(&mut [0; 8], 2).unwrap().bytes, 4, "the connection goes on");
}
