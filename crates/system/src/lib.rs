//! Sizes, byte ranges, float types, and facts about files from the operating system.
//!
//! The loader, the probe and the other packages share this crate, so that they need not depend on
//! each other. No module here uses another one, except `units`.
//!
//! | module | holds |
//! |---|---|
//! | [`units`] | byte ranges, alignment, sizes for people |
//! | [`FloatType`] | the float types of weights |
//! | [`file_system`] | which kind of file system holds a file |
//! | [`choose_page_size`] | huge or small pages for fresh memory |
//! | [`page_cache`] | which pages of a file are cached |
//! | [`TextPosition`] | line and column, for messages |
//! | [`folder`] | the names in a folder |
//! | [`small_file`] | a small file that a user named, whole |

pub mod file_system;
mod float_type;
pub mod folder;
pub mod page_cache;
mod page_size;
pub mod small_file;
mod text_position;
pub mod units;

pub use self::file_system::FileSystem;
pub use self::float_type::FloatType;
pub use self::page_size::choose_page_size;
pub use self::text_position::TextPosition;
pub use self::units::HumanBytes;
