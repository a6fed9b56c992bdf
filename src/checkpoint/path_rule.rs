//! The rule for names that are read from a file and become part of a path.
//!
//! Only the text is checked. Symbolic links on disk are followed: the owner of the disk made them,
//! and hub caches consist of them.

/// Checks that a name stays inside the directory it is joined to. Returns it without leading `./`.
///
/// # Errors
/// The rule that it breaks.
pub(crate) fn relative(name: &str) -> Result<&str, &'static str> {
    let mut rest = name;
    while let Some(stripped) = rest.strip_prefix("./") {
        rest = stripped;
    }
    if rest.is_empty() {
        return Err("it is empty");
    }
    if name.starts_with('/') || rest.starts_with('/') {
        return Err("it is absolute");
    }
    if rest.contains('\0') {
        return Err("it contains a NUL");
    }
    if rest.contains('\\') {
        return Err("it contains a backslash");
    }
    if has_scheme(rest) {
        return Err("it has a scheme or a drive");
    }
    for part in rest.split('/') {
        match part {
            "" => return Err("it has an empty part"),
            "." => return Err("it has a part `.`"),
            ".." => return Err("it has a part `..`"),
            _ => {}
        }
    }
    Ok(rest)
}

/// As [`relative`], for a name that must be a single folder.
pub(super) fn single(name: &str) -> Result<&str, &'static str> {
    match relative(name)? {
        rest if rest.contains('/') || rest.len() != name.len() => Err("it has several parts"),
        rest => Ok(rest),
    }
}

/// True for `https:...`, `file:...` and `C:...` (RFC 3986, section 3.1).
fn has_scheme(name: &str) -> bool {
    name.split_once(':').is_some_and(|(scheme, _)| {
        scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme.chars().all(|character| character.is_ascii_alphanumeric() || "+-.".contains(character))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_directory() {
        for (name, expected) in [
            ("model.safetensors", Some("model.safetensors")),
            ("./model.safetensors", Some("model.safetensors")),
            ("././a/b", Some("a/b")),
            ("...", Some("...")),
            ("..a/b..", Some("..a/b..")),
            (" ", Some(" ")),
            ("a b:c", Some("a b:c")),
            ("", None),
            (".", None),
            ("./", None),
            ("..", None),
            ("../x", None),
            ("a/../x", None),
            ("a/..", None),
            ("a/./x", None),
            ("/etc/passwd", None),
            (".//etc/passwd", None),
            ("a//b", None),
            ("a/", None),
            ("a\0b", None),
            ("a\\..\\b", None),
            ("C:x", None),
            ("file:x", None),
            ("https://host/x", None),
        ] {
            assert_eq!(relative(name).ok(), expected, "{name:?}");
        }
        assert!(single("unet").is_ok() && single("a/b").is_err() && single("./a").is_err());
    }
}
