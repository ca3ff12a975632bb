//! One GET over HTTP, without a client library.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use crate::poll::PATIENCE;

/// What a server answered.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The head: status line and headers.
    pub head: String,
    /// The body.
    pub body: String,
}

/// Asks `address` (host and port) for `path`.
///
/// # Errors
/// When the connection fails, or what came is no HTTP answer.
pub fn get(address: &str, path: &str) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| io::Error::other("no head"))?;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .ok_or_else(|| io::Error::other("no status"))?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { dechunk(body) } else { Some(body.to_owned()) };
    let body = body.ok_or_else(|| io::Error::other("a broken chunk"))?;
    Ok(Answer { status, head: head.to_owned(), body })
}

fn dechunk(mut body: &str) -> Option<String> {
    let mut whole = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n")?;
        let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
        if size == 0 {
            return Some(whole);
        }
        whole.push_str(rest.get(..size)?);
        body = rest.get(size..)?.strip_prefix("\r\n")?;
    }
}
